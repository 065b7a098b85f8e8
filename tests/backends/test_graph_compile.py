"""graph_compile: what Inductor compiles under our choices is kept apart in its cache."""

import threading

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


def test_keys_go_back_in_every_thread() -> None:
    """One thread leaves while another is still inside."""
    before, inside, leave = config.cache_key_tag, threading.Event(), threading.Event()

    def other() -> None:
        with graph_compile._own_choices():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    try:
        with graph_compile._own_choices():
            thread.start()
            inside.wait()
        assert config.cache_key_tag == before
    finally:
        leave.set()
        thread.join()
    assert config.cache_key_tag == before
