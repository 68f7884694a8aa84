"""The machine that runs PTX finds the faults that it is there for, and computes like a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from ptx_machine import Machine, MachineError, Memory, round_bf16

HEAD = """
.visible .entry k(
	.param .u64 .ptr .global .align 16 k_param_0,
	.param .u32 k_param_1
)
.reqntid 64, 1, 1
{
	.shared .align 16 .b8 box[1024];
	.shared .align 8 .b8 bar[8];
	ld.param.b64 	%rd1, [k_param_0];
	ld.param.b32 	%r90, [k_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	shl.b32 	%r2, %r1, 2;
	mov.b32 	%r3, box;
	add.s32 	%r4, %r3, %r2;
"""


def run(body: str, *, cluster: int = 1, seed: int = 0) -> npt.NDArray[np.uint32]:
    """What a kernel of 64 threads leaves in an output of 64 words."""
    out = np.zeros(64, np.uint32)
    memory = Memory()
    address = memory.add(out, writable=True)
    text = HEAD + "".join(f"\t{line};\n" for line in body.strip().split(";")) + "\tret;\n}\n"
    text = "\n".join(line.replace(";;", ";") for line in text.split("\n"))
    Machine(text).launch(
        grid=(cluster, 1, 1),
        cluster=cluster,
        dynamic_shared_bytes=0,
        arguments=[address, 7],
        memory=memory,
        seed=seed,
    )
    return out


EXCHANGE = """
st.shared.b32 [%r4], %r1; {barrier}
xor.b32 %r5, %r1, 63; shl.b32 %r5, %r5, 2; add.s32 %r5, %r5, %r3;
ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd3], %r6
"""


def test_threads_exchange_through_shared_memory_behind_a_barrier() -> None:
    """Negative control of the next test, and that values arrive where they should."""
    out = run(EXCHANGE.format(barrier="bar.sync 0;"))
    assert out.tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (EXCHANGE.format(barrier=""), "read before it is written"),
        ("st.global.b32 [%rd3+256], %r1", "outside the tensors"),
        ("st.global.b32 [%rd3+128], %r1", "beyond the end|outside the tensors"),
        ("st.global.b32 [%rd3+2], %r1", "not aligned"),
        ("ld.shared.b32 %r6, [%r4]", "read before it is written"),
        ("st.shared.b32 [%r4+1024], %r1; st.shared.b32 [%r4+2048], %r1", "outside"),
        ("setp.ge.s32 %p1, %r1, 32; @%p1 bar.sync 0", "nobody can go on"),
        ("setp.ge.s32 %p1, %r1, 32; @%p1 barrier.cluster.arrive; barrier.cluster.wait", "nobody"),
        ("setp.ge.s32 %p1, %r1, 16; @%p1 shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1", "shuffle of all"),
        ("mapa.shared::cluster.u32 %r6, %r4, 5", "rank 5"),
        ("mbarrier.arrive.expect_tx.shared.b64 %rd9, [bar], 4", "not initialised"),
        ("magic.b32 %r6, %r1", "unknown instruction"),
        ("cp.async.cg.shared.global [%r3], [%rd1], 16, 16; cp.async.commit_group", "under way"),
    ],
)
def test_a_planted_fault_is_found(body: str, named: str) -> None:
    """A machine that lets these pass would call a kernel right that hangs or reads rubbish."""
    with pytest.raises(MachineError, match=named):
        run(body)


SEND = """
setp.ne.b32 %p1, %r1, 0; mov.b32 %r7, 1; mov.b32 %r8, {bytes};
@!%p1 mbarrier.init.shared.b64 [bar], %r7;
@!%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [bar], %r8;
bar.sync 0; barrier.cluster.arrive; {wait}
mov.u32 %r10, %ctaid.x; xor.b32 %r11, %r10, 1;
mapa.shared::cluster.u32 %r12, %r4, %r11; mov.b32 %r13, bar;
mapa.shared::cluster.u32 %r14, %r13, %r11; add.s32 %r15, %r1, %r10;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r12], %r15, [%r14];
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [bar], 0;
ld.shared.b32 %r6, [%r4]; setp.ne.b32 %p3, %r10, 0; @%p3 st.global.b32 [%rd3], %r6
"""


def test_blocks_of_a_cluster_exchange_by_async_stores() -> None:
    """Negative control of the next test."""
    out = run(SEND.format(bytes=256, wait="barrier.cluster.wait;"), cluster=2)
    assert out.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("bytes_", "wait", "named"),
    [
        (256, "", "not initialised"),
        (260, "barrier.cluster.wait;", "nobody can go on"),
        (128, "barrier.cluster.wait;", "ended|bytes due|before it is written"),
    ],
)
def test_a_broken_exchange_is_found(bytes_: int, wait: str, named: str) -> None:
    """A store before the peer is ready, bytes that never come, and a block that ends too soon."""

    def in_many_orders() -> None:
        # A race shows in some orders of warps only.
        for seed in range(20):
            run(SEND.format(bytes=bytes_, wait=wait), cluster=2, seed=seed)

    with pytest.raises(MachineError, match=named):
        in_many_orders()


def test_bf16_is_rounded_to_nearest_even() -> None:
    """The tests' x would not be what the kernel is given."""
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625], np.float32)
    assert [hex(v) for v in round_bf16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xbf80"]
