"""Parts of the GPU benchmarks: `benchmarks/gpu.py` and `benchmarks/gpu_facts.py` run them."""
