"""A fuzzer of hybridq's public door: legal and illegal calls, and what must hold after each.

`door.PublicDoor` is a hypothesis state machine: it keeps a pool of quantized tensors and throws
operations at them. `test_fuzz.py` runs it briefly with fixed seeds, `make fuzz` for as long as one
likes (`python -m fuzz --help`, from the folder `tests`).
"""
