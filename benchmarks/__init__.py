"""Times flexattn beside its peers on the same tensors, and writes the README's tables and pictures from what was measured.

`python -m benchmarks --help` lists the commands; results are rows in benchmarks/results/*.json.
"""
