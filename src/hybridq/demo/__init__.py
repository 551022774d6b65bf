"""The training demo: one small language model, trained once per recipe on the same batches."""
