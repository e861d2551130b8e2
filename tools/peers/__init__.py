"""Parts of tools/bench_peers.py; worker.py runs in the peers' own environments."""
