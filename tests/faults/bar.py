"""The reliability bar: every row that is held here, and which tests elsewhere hold it, too.

A row's numbers are counted while its tests run, never written down.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["REFERENCES", "ROWS", "Count", "Reference"]

ROWS = {
    "C1": "kill -9 at random times in a publish",
    "C2": "kill -9 at every system call of publish, prune",
    "C3": "every system call fails, with each of 9 errors",
    "C4": "power loss",
    "D1": "disk full",
    "D2": "read-only file system, read-only overlay layer",
    "D3": "no permission",
    "I1": "every byte of an entry changed",
    "I2": "every truncation length, and 1 to 64 bytes appended",
    "I3": "parts swapped with valid others, other schema",
    "I4": "odd files in place of a file",
    "I5": "digest right, cubin wrong",
    "P1": "32 and 64 builders, one cold key",
    "P2": "the same without locks",
    "P3": "builders and readers of many keys at once",
    "P4": "lock holder killed or stopped",
    "P5": "fork while holding, threads",
    "P6": "the winner of a race is invisible",
    "G1": "prune while readers and writers run",
    "G2": "least-recently-used order, size limit, pins",
    "G3": "clock 10 years ahead or behind",
    "T1": "root writable by others, of others, or linked by others",
    "T2": "umask",
    "T3": "HOME unset, unwritable or relative; odd paths",
    "S3": "fuzzed records",
    "S4": "fuzzed manifests",
    "V1": "newer or older store schema beside ours",
    "V2": "every input of the key or the provenance changed",
    "V3": "hash seed, locale, time zone, directory, installation",
    "R1": "build twice, the same bytes",
    "H1": "compiler process misbehaves",
    "H2": "Ctrl-C, SIGTERM, closed stdout",
    "L1": "leaks",
    "L2": "speed",
}


class Count(enum.Enum):
    """How the tries of a test that knows nothing of this bar are counted."""

    GETS = "gets"
    """Calls of `Store.get` in the test's own process: it tries one fault before each."""

    CASES = "cases"
    """One for each case that ran."""


class Reference(NamedTuple):
    """Tests elsewhere that hold a row: the beginning of their node id without `tests/`."""

    row: str
    test: str
    counted: Count = Count.CASES


_FAULTS = "aot/test_store_faults.py::"
_STORE = "aot/test_store.py::"
_PRUNE = "aot/test_prune.py::"
_LOCKS = "aot/test_locks.py::"
_PROCESS = "aot/test_runtime_process.py::"

REFERENCES = (
    Reference("C3", _FAULTS + "test_an_error_of_any_call_is_typed_and_leaves_nothing", Count.GETS),
    Reference("C3", _FAULTS + "test_an_error_of_any_call_while_reading_is_a_miss", Count.GETS),
    Reference("C2", _FAULTS + "test_a_publisher_killed_at_any_call_leaves_the_entry", Count.GETS),
    Reference("D1", _FAULTS + "test_a_full_disk_is_told_and_leaves_no_ref_and_no_temporary_file"),
    Reference("D2", _FAULTS + "test_a_read_only_file_system_serves_hits_and_refuses_writes"),
    Reference("D3", _FAULTS + "test_missing_permissions_are_typed"),
    Reference("I1", _STORE + "test_every_flipped_byte_is_a_miss", Count.GETS),
    Reference("I2", _STORE + "test_every_truncation_and_appended_byte_is_a_miss", Count.GETS),
    Reference("I3", _STORE + "test_swapped_parts_of_valid_entries_are_misses", Count.GETS),
    Reference("I3", _STORE + "test_a_record_that_is_sound_but_not_this_one", Count.GETS),
    Reference("I4", _STORE + "test_odd_files_in_place_of_a_file_are_misses_and_heal"),
    Reference("I4", _STORE + "test_odd_files_in_place_of_a_folder_are_misses_and_heal"),
    Reference("I4", _STORE + "test_a_hard_link_counts_by_its_bytes"),
    Reference("I4", _STORE + "test_a_link_in_place_of_a_folder_is_refused"),
    Reference("P2", _FAULTS + "test_without_kernel_locks_work_goes_on"),
    Reference("P4", _LOCKS + "test_a_timeout_names_the_process_that_holds_the_lock"),
    Reference("P4", _LOCKS + "test_a_stopped_holder_keeps_the_lock_and_a_killed_one_does_not"),
    Reference("P5", _LOCKS + "test_a_forked_child_cannot_release_the_lock_of_its_parent"),
    Reference("P5", _LOCKS + "test_a_child_that_lives_on_does_not_keep_a_released_lock"),
    Reference("P5", _PROCESS + "test_a_fork_after_a_kernel_was_loaded_is_told_clearly"),
    Reference("P5", _PROCESS + "test_a_fork_while_another_thread_loads_does_not_hang_the_child"),
    Reference("G1", _PRUNE + "test_a_publisher_keeps_prune_out_from_its_first_blob_to_its_ref"),
    Reference("G1", _PRUNE + "test_a_reader_that_meets_a_prune_finds_the_entry_or_a_clean_miss"),
    Reference("G2", _PRUNE + "test_what_was_used_longest_ago_goes_until_the_limit_holds"),
    Reference("G2", _PRUNE + "test_pinned_entries_stay_whatever_the_rules_say"),
    Reference("G2", _PRUNE + "test_a_pin_that_comes_between_plan_and_execution_counts"),
    Reference("G3", _PRUNE + "test_ages_survive_clocks_that_are_years_off"),
    Reference("G3", _PRUNE + "test_a_date_in_the_future_makes_nothing_immortal"),
    Reference("G3", _PRUNE + "test_a_clock_before_the_first_release_dates_nothing"),
    Reference("T1", _FAULTS + "test_what_others_could_have_written_is_refused"),
    Reference("T1", _FAULTS + "test_nothing_is_written_where_others_could_write"),
    Reference("T2", _FAULTS + "test_modes_do_not_depend_on_the_umask"),
    Reference("T3", "aot/test_location.py::test_an_environment_without_a_home_is_refused"),
    Reference("T3", "aot/test_location.py::test_a_path_that_is_not_absolute_is_a_usage_error"),
    Reference("T3", _STORE + "test_unusual_names_of_roots_work"),
    Reference("T3", _STORE + "test_a_path_longer_than_the_system_allows_is_a_store_error"),
    Reference("S3", "aot/test_artifact.py::test_a_record_in_any_other_form_is_damaged"),
    Reference("V1", _STORE + "test_other_versions_of_the_store_are_left_alone"),
    Reference("V2", "aot/test_key.py::test_every_field_alone_changes_the_digest"),
    Reference("V2", "aot/test_key.py::test_one_byte_of_a_source_changes_the_digests"),
    Reference("V2", "aot/test_builder.py::test_another_compiler_makes_entries_stale"),
    Reference("V2", "aot/test_builder.py::test_other_options_make_entries_stale"),
    Reference("V2", "aot/test_explain.py::test_every_field_of_a_key_is_named_when_it_alone"),
    Reference("V2", "aot/test_explain.py::test_a_stale_entry_names_the_input_that_changed"),
    Reference("R1", "aot/test_real_build.py::test_bytes_depend_on_nothing_but_the_inputs"),
    Reference("H1", "aot/test_pool.py::test_a_process_that_misbehaves_costs_its_own_key_only"),
    Reference("H1", "aot/test_pool.py::test_a_log_of_100_megabytes_takes_no_memory"),
    Reference("H1", "aot/test_pool.py::test_a_process_over_its_time_limit_is_ended"),
    Reference("H2", "aot/test_cli.py::test_a_signal_ends_the_build_and_its_processes"),
    Reference("H2", "aot/test_cli.py::test_a_closed_pipe_ends_the_program_quietly"),
)
