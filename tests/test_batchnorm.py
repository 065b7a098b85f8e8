"""replace_batch_norm: parameters are kept, groups divide the channels, and the result is taken as isolated."""

import pytest
import torch
from torch import nn

from dpquant_compile import torchvision_compat
from dpquant_compile.batchnorm import replace_batch_norm
from dpquant_compile.errors import CompileSpecError, IsolationError
from tests.support.models import (
    BatchNormNet,
    proved,
)


def test_replaced_batch_norms_keep_their_parameters() -> None:
    model = BatchNormNet().double()
    model.bn2.eval()
    names, parameters, eps = list(dict(model.named_parameters())), list(model.parameters()), model.bn1.eps
    assert replace_batch_norm(model, groups=3) is model
    assert [type(model.bn1), model.bn1.num_groups, model.bn1.eps] == [nn.GroupNorm, 2, eps]
    assert list(model.state_dict()) == names and (model.bn1.training, model.bn2.training) == (True, False)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    model(x).sum().backward()
    assert parameters[names.index("bn1.weight")].grad is not None


def test_groups_divide_the_channels() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert [replace_batch_norm(kind(48)).num_groups for kind in kinds] == [24] * 4
    assert [replace_batch_norm(nn.BatchNorm2d(n)).num_groups for n in (1, 7, 32, 37, 64, 100)] == [1, 7, 32, 1, 32, 25]
    assert replace_batch_norm(nn.BatchNorm2d(12), groups=lambda channels: channels // 3).num_groups == 4
    norm = replace_batch_norm(nn.BatchNorm1d(6, affine=False))
    assert norm.num_groups == 3 and norm.weight is None and not norm.state_dict()
    assert replace_batch_norm(nn.BatchNorm1d(6))(torch.randn(3, 6)).abs().min() > 0  # a group of one would give 0
    assert replace_batch_norm(nn.BatchNorm2d(4, bias=False)).bias is None
    for groups in (0, True, 2.5):
        with pytest.raises(CompileSpecError, match=r"groups=.* give an integer of at least 1"):
            replace_batch_norm(nn.BatchNorm2d(4), groups=groups)


def test_shared_and_lazy_batch_norms() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), nn.Sequential(norm, nn.ReLU()))
    replace_batch_norm(model)
    assert model[0] is model[2][0] and isinstance(model[0], nn.GroupNorm)
    proved(model, torch.randn(5, 4))
    lazy = nn.Sequential(nn.BatchNorm1d(4), nn.LazyBatchNorm1d())
    with pytest.raises(CompileSpecError, match=r"module '1' \(LazyBatchNorm1d\).*run the lazy model once"):
        replace_batch_norm(lazy)
    assert isinstance(lazy[0], nn.BatchNorm1d), "nothing is replaced if not all can be"
    lazy(torch.randn(5, 4))
    replace_batch_norm(lazy)
    plain = nn.Linear(4, 4)
    assert replace_batch_norm(plain) is plain


def test_a_model_with_batch_norm_is_taken_once_it_is_replaced() -> None:
    model, x = BatchNormNet(), torch.randn(4, 3, 8, 8)
    with pytest.raises(IsolationError, match="replace_batch_norm"):
        proved(model, x)
    proved(replace_batch_norm(model), x)


def test_what_a_batch_norm_of_timm_does_after_the_norm_is_kept() -> None:
    torchvision_compat.models()  # before timm, which imports torchvision
    layers = pytest.importorskip("timm").layers
    model = nn.Sequential(layers.BatchNormAct2d(4, drop_layer=lambda: nn.Dropout(0.5)), layers.BatchNormAct2d(4)).eval()
    names = list(dict(model.named_parameters()))
    replace_batch_norm(model, groups=2)
    assert list(model.state_dict()) == names and isinstance(model[0].drop, nn.Dropout) and not model[0].drop.training
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(model(x), nn.functional.group_norm(nn.functional.group_norm(x, 2).relu(), 2).relu())
    proved(model, x)


def test_a_batch_norm_with_a_forward_of_its_own_is_refused() -> None:
    class Scaled(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.BatchNorm1d(4), Scaled(4))
    with pytest.raises(CompileSpecError, match=r"module '1' \(Scaled\).*forward\(\) of its own.*replace it by hand"):
        replace_batch_norm(model)
    assert isinstance(model[0], nn.BatchNorm1d), "nothing is replaced if not all can be"
