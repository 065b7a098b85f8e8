"""The table of sites, and how `sites=` selects from it."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from torch import nn

from dpquant_compile.errors import DPQuantError, SiteError
from dpquant_compile.passes.canonical.mark_sites import collect_sites, declared_sites
from dpquant_compile.sites import BatchAxis, ConvGeometry, Site, SiteTable, Skipped, renumber, select_sites
from tests.support.models import Attention, Functional, GroupNormNet, TextNet, Transposed, canonical, seeded


@pytest.fixture(scope="module")
def table() -> SiteTable:
    return collect_sites(canonical(seeded(GroupNormNet)))


def test_table_reads_by_number_name_and_slice(table: SiteTable) -> None:
    assert len(table) == 6
    assert table.names[0] == "stem" and table[0] is table["stem"]
    assert [site.index for site in table] == list(range(6))
    assert table[-1].name == "fc" and [s.name for s in table[4:]] == ["blocks.1.conv2", "fc"]
    assert "fc" in table and table[0] in table and "nope" not in table


def test_unknown_name_lists_the_names(table: SiteTable) -> None:
    with pytest.raises(SiteError, match=r"no site is named 'conv9'. The model has 6: stem, blocks\.0\.conv1"):
        table["conv9"]


def test_table_prints_sites_and_reasons() -> None:
    printed = str(collect_sites(canonical(seeded(Transposed))))
    assert printed.splitlines() == [
        "  0  down (conv2d 4×2×3×3 s2x2 p0x0)",
        "  -  up (conv_transpose2d) skipped: transposed convolution is not supported in low precision",
    ]


def test_site_knows_its_layer(table: SiteTable) -> None:
    site = table["blocks.0.conv1"]
    assert (site.op, site.weight, site.bias) == ("conv2d", "blocks.0.conv1.weight", None)
    assert site.weight_shape == (4, 4, 3, 3) and site.module_types == ("Conv2d", "_ConvNd")
    assert site.geometry == ConvGeometry((1, 1), (1, 1), (1, 1), 1)
    assert site.source is not None and site.source.startswith("models.py:") and "self.conv1(x)" in site.source
    with pytest.raises(FrozenInstanceError):
        site.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("geometry", "text"),
    [
        (ConvGeometry((1,), (0,), (1,)), "s1 p0"),
        (ConvGeometry((2, 1), (1, 0), (1, 3), 4), "s2x1 p1x0 d1x3 g4"),
    ],
)
def test_geometry_prints_short(geometry: ConvGeometry, text: str) -> None:
    assert str(geometry) == text


def test_axis_prints_short() -> None:
    assert str(BatchAxis(1)) == "dim 1"
    assert str(BatchAxis(0, 3, 5)) == "dim 0 (3·B·5)"


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["stem", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2", "fc"]),
        ("fc", ["fc"]),
        ("blocks.*", ["blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2"]),
        ("*conv2", ["blocks.0.conv2", "blocks.1.conv2"]),
        ("linear", ["fc"]),
        ("conv2d", ["stem", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2"]),
        (nn.Linear, ["fc"]),
        (lambda site: site.bias is None, ["blocks.0.conv1", "blocks.1.conv1"]),
        ([nn.Linear, "stem", lambda site: site.index == 1], ["stem", "blocks.0.conv1", "fc"]),
        (("fc", "fc"), ["fc"]),
        ({"fc"}, ["fc"]),
    ],
)
def test_select(table: SiteTable, chosen: Any, names: list[str]) -> None:
    found = select_sites(table, chosen)
    assert list(found.names) == names
    assert [site.index for site in found] == list(range(len(names)))
    dropped = {skip.name: skip.reason for skip in found.skipped}
    assert dropped == dict.fromkeys(set(table.names) - set(names), "not selected by sites=")


@pytest.mark.parametrize("chosen", ["conv", nn.Conv3d, lambda site: False, ["fc", "head"], "", "FC"])
def test_a_rule_that_matches_nothing_is_an_error(table: SiteTable, chosen: Any) -> None:
    with pytest.raises(SiteError, match=r"matches none of the 6 sites: stem, .*, fc"):
        select_sites(table, chosen)


def test_an_empty_list_is_an_error(table: SiteTable) -> None:
    with pytest.raises(SiteError, match=r"sites=\[\] selects nothing"):
        select_sites(table, [])


@pytest.mark.parametrize("chosen", [5, [5], [None]], ids=repr)
def test_a_rule_of_the_wrong_kind_is_a_typed_error(table: SiteTable, chosen: Any) -> None:
    with pytest.raises(DPQuantError):
        select_sites(table, chosen)


def test_selection_keeps_what_was_skipped_before() -> None:
    found = select_sites(collect_sites(canonical(seeded(Functional))), "table")
    assert found.names == ("table",)
    assert len(found.skipped) == 2, "both convs, the one with a parameter and the one with a computed weight"


def test_types_find_subclasses_by_their_base() -> None:
    class Standardised(nn.Linear):
        pass

    model = nn.Sequential(Standardised(4, 4), nn.Linear(4, 2))
    assert select_sites(collect_sites(canonical(model)), nn.Linear).names == ("0", "1")


def test_types_find_the_subclass_itself() -> None:
    class Standardised(nn.Linear):
        pass

    model = nn.Sequential(Standardised(4, 4), nn.Linear(4, 2))
    assert select_sites(collect_sites(canonical(model)), Standardised).names == ("0",)


def test_attention_is_selected_by_its_type() -> None:
    found = select_sites(collect_sites(canonical(seeded(Attention))), nn.MultiheadAttention)
    assert found.names == ("attn.in_proj", "attn.out_proj")


def test_renumber_counts_from_zero() -> None:
    sites = [replace(Site("a", "linear", 7)), Site("b", "linear", 3)]
    assert [site.index for site in renumber(sites)] == [0, 1]


@pytest.mark.parametrize("make", [GroupNormNet, Attention, Transposed])
def test_declared_sites_are_those_of_the_graph(make: Any) -> None:
    model = seeded(make)
    declared, found = declared_sites(model), collect_sites(canonical(model))
    assert declared.names == found.names
    assert [s.op for s in declared] == [s.op for s in found]
    assert [s.module_types for s in declared] == [s.module_types for s in found]


def test_declared_sites_of_tied_layers() -> None:
    assert declared_sites(seeded(TextNet)).names == ("mix", "head")


@pytest.mark.xfail(strict=True, reason="declared_sites says in_proj where cross attention has in_proj.q and .kv")
def test_declared_sites_of_cross_attention() -> None:
    model = seeded(lambda: Attention("cross"))
    assert declared_sites(model).names == collect_sites(canonical(model)).names


def test_skipped_is_a_record() -> None:
    skip = Skipped("up", "conv_transpose2d", "because")
    assert skip == Skipped("up", "conv_transpose2d", "because", None)
