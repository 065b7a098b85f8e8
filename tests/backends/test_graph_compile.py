"""graph_compile: what Inductor compiles under our choices is kept apart in its cache."""

from torch.compiler import config

from dpquant_compile.backends import graph_compile


def test_the_keys_of_inductors_cache_have_a_digest_of_our_operators() -> None:
    before = config.cache_key_tag
    with graph_compile._own_choices():
        tag = config.cache_key_tag
        assert tag != before and graph_compile._digest() in tag
        with graph_compile._own_choices():
            assert config.cache_key_tag == tag
        assert config.cache_key_tag == tag
    assert config.cache_key_tag == before
