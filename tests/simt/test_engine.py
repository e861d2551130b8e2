def test_module(simt):
    assert simt.__name__ == "_simt"
