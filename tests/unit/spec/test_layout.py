"""Layouts: text form, and which of them can divide a model."""

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.layout import Layout, stage_layers
from verl_fuse.spec.model_names import model_named


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, pp=4, dp=8), Layout(dp=8, ep=4), Layout(cp=2), Layout(dp=8, shards=4)]
)
def test_the_text_form_parses_back(layout: Layout):
    assert Layout.parse(str(layout)) == layout


def test_the_text_form_reads_like_the_interface():
    layout = Layout.parse("tp2 pp4 dp8")
    assert (layout, layout.devices) == (Layout(tp=2, pp=4, dp=8), 64)
    assert str(layout) == "tp2 pp4 dp8"


@pytest.mark.parametrize("text", ["tp", "tp2 tp4", "tp0", "xp2", "2tp", "fsdp0"])
def test_other_text_is_refused(text: str):
    with pytest.raises(FuseError, match="layout"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("layout", "model", "fault"),
    [
        ("tp8", "qwen2.5-7b", "tp=8; needs a divisor of heads=28"),
        ("tp3", "llama-7b", "tp=3; needs a divisor of heads=32"),
        ("tp8", "qwen2.5-3b", None),
        ("pp64", "llama-7b", "pp=64; needs at most layers=32"),
        ("dp8 ep8", "llama-7b", "ep needs experts"),
        ("dp24 ep24", "qwen3-30b-a3b", "ep=24; needs a divisor of experts=128"),
        ("dp8 ep8", "qwen3-30b-a3b", None),
    ],
)
def test_layouts_that_cannot_divide_a_model(layout: str, model: str, fault: str | None):
    found = Layout.parse(layout).fault(model_named(model))
    assert found == fault
    if fault:
        with pytest.raises(FuseError, match=f"layout {layout} for {model}: {fault}"):
            Layout.parse(layout).check(model_named(model))


def test_tensor_ranks_and_kv_heads_must_divide_one_another():
    model = model_named("qwen2.5-14b")
    assert Layout(tp=8).fault(model) is None
    assert Layout(tp=20).fault(model) == "tp=20; needs a divisor or a multiple of kv_heads=8"


def test_experts_are_shared_out_within_a_stage():
    with pytest.raises(FuseError, match=r"ep=16; needs a divisor of tp\*dp\*cp=8"):
        Layout(tp=2, dp=4, ep=16)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("tp2 dp4 ep4", 2),
        ("tp2 cp2 dp4 pp8 ep16", 1),
        ("tp4 cp2 ep2", 4),
        ("tp8 ep4", 2),
        ("dp8", 1),
        ("tp4 dp8 ep8 etp1", 1),
    ],
)
def test_experts_are_cut_by_the_tensor_ranks_that_they_leave(text: str, ranks: int):
    """Megatron's folding: ep times the ranks of an expert divide tp * dp * cp."""
    layout = Layout.parse(text)
    assert layout.expert_tp == ranks
    assert layout.tp * layout.dp * layout.cp % (layout.ep * ranks) == 0
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["tp4 dp2 ep4 etp3", "tp4 dp2 ep4 etp4", "dp8 ep4 etp2"])
def test_more_ranks_cut_no_expert(text: str):
    with pytest.raises(FuseError, match=r"etp=\d; needs a divisor of tp=\d, and with ep one of tp\*dp\*cp=8"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [("dp8 fsdp3", r"fsdp=3; needs a divisor of dp\*cp=8"), ("tp2 dp8 fsdp8", "fsdp=8; needs tp=pp=ep=1")],
)
def test_shards_share_one_model_and_nothing_else(layout: str, fault: str):
    assert Layout.parse("dp8 cp2 fsdp4").holders == 4
    assert Layout(tp=2, dp=4).holders == 2
    with pytest.raises(FuseError, match=fault):
        Layout.parse(layout)


def test_middle_stages_take_the_remainder():
    assert stage_layers(32, 4) == (8, 8, 8, 8)
    assert stage_layers(10, 4) == (2, 3, 3, 2)
    assert stage_layers(7, 4) == (2, 2, 2, 1)
    assert sum(stage_layers(94, 16)) == 94
