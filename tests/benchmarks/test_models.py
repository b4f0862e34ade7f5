"""The benchmark models are the published ones (parameter counts) and every tiny variant trains."""

import math

import pytest
import torch

from benchmarks.models import MODELS, WORKLOADS, checkpoint_blocks, workload

PARAMETERS = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "unet": 31_043_586,
    "gpt2": 124_439_808,
    "vit": 86_567_656,
    "lstm": 19_780_400,
    "encoder": 27_573_248,
}


@pytest.mark.parametrize("name", MODELS)
def test_full_shape_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = workload(name, "paper").build()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_tiny_variant_learns_its_batch(name: str) -> None:
    torch.manual_seed(0)
    task = workload(name, "tiny")
    model = task.build()
    inputs, targets = task.batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def test_bench_differs_from_paper_only_in_data_and_grid() -> None:
    for name in MODELS:
        if name == "vgg16":  # its classifier is sized by the image
            continue
        with torch.device("meta"):
            bench, paper = (workload(name, scale).build() for scale in ("bench", "paper"))
        shapes = [[p.shape for p in model.parameters()] for model in (bench, paper)]
        assert shapes[0] == shapes[1], name


def test_batch_size_can_be_overridden() -> None:
    inputs, targets = WORKLOADS["resnet50"]["tiny"].batch(3)
    assert inputs.shape == (3, 3, 32, 32)
    assert targets.shape == (3,)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_by_hand_it_is_the_same_model(name: str) -> None:
    losses = []
    for wrap in (False, True):
        torch.manual_seed(0)
        task = workload(name, "tiny")
        model = task.build()
        if wrap:
            checkpoint_blocks(name, model)
        inputs, targets = task.batch()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        losses.append((loss.item(), [p.grad.norm().item() for p in model.parameters() if p.grad is not None]))
    assert losses[0] == losses[1]
