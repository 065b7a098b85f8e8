"""Room that kernels use again: one per name and thread."""

import threading

import torch

from dpquant_compile.backends.scratch import scratch


def test_a_name_gets_the_same_room_again_in_any_shape_that_fits() -> None:
    first = scratch("test", 3, 4)
    assert first.shape == (3, 4) and first.dtype == torch.float32
    assert scratch("test", 2, 5).data_ptr() == first.data_ptr() != scratch("test_other", 3, 4).data_ptr()
    assert scratch("test", 5, 5).shape == (5, 5)


def test_each_thread_has_its_own() -> None:
    own, found = scratch("test", 4), []
    thread = threading.Thread(target=lambda: found.append(scratch("test", 4).data_ptr()))
    thread.start()
    thread.join()
    assert found != [own.data_ptr()]


def test_room_taken_in_inference_mode_can_be_written_to_later() -> None:
    with torch.inference_mode():
        scratch("test_inference", 4)
    assert not scratch("test_inference", 4).fill_(1.0).is_inference()
