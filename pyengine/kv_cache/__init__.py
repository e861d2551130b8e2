"""KV blocks: the pool, the block tables, and what requests share. No tensors here; a backend owns the memory."""
