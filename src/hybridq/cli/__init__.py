"""The commands of the command line, one per file; `hybridq_cli` loads them."""
