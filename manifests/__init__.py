"""Manifests of public model families, one YAML file each."""
