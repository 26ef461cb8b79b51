"""Folds on a GPU: the CPU's masks, the literal twins, the same bits twice.

A CPU that iterates as a GPU does stands in for one, so that all of this runs everywhere; matrices are narrow, and the
width from which leading vectors are iterated is lowered to match.
"""

import numpy
import pytest
import torch
from reference import FLOAT32_EPS, Settings, ShareSettings, reference_fold, safe_share
from torch import Tensor

from safemerge_pl.checkpoints import open_checkpoint
from safemerge_pl.maths import leading, linalg
from safemerge_pl.maths.linalg import right_singular_basis
from safemerge_pl.methods import MergeMethod, SafeMerge, SafeShare, Stack
from safemerge_pl.zoo import Zoo

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
MASK_ERROR = 1e-4
"""Share of entries whose risk lies within rounding of the threshold."""

MERGE = SafeMerge(scoring_rank=21, recovery_rank=10, task_rank=4)
SHARE = SafeShare(scoring_rank=21, shared_rank=32)

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def in_full(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The device iterates from a width of 64 on; how many matrices each full decomposition got after all."""
    monkeypatch.setattr(linalg, "_ITERATED_ON", (device,))
    monkeypatch.setattr(linalg, "_LARGE", 64)
    calls: list[int] = []
    decompose = leading._decompose

    def count(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        calls.append(len(gram))
        return decompose(gram, rank)

    monkeypatch.setattr(leading, "_decompose", count)
    return calls


def zoo_stack(task: str, earlier: str, device: str, shape: tuple[int, int] = (128, 128), layers: int = 4) -> Stack:
    """Real weights: the second task of a stream whose first was added as it is."""
    zoo = Zoo()
    base, before, after = (open_checkpoint(path) for path in (zoo.model, zoo.expert(earlier), zoo.expert(task)))
    names = tuple(name for name in after if "layers" in name and after.shape(name) == shape)[:layers]
    parts = [torch.stack([source[name].float() for name in names]).to(device) for source in (base, before, after)]
    return Stack(names, 2, *parts)


def masks(stack: Stack) -> list[Tensor]:
    """What both methods keep."""
    directions = right_singular_basis(stack.task_vector, MERGE.scoring_rank)
    return [MERGE._mask(stack, directions).cpu(), SHARE._mask(stack, SHARE.scoring_rank).cpu()]  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["mnist", "flags", "letters"])
@pytest.mark.parametrize("shape", [(128, 128), (512, 128), (128, 512)])
def test_masks_of_real_weights_are_those_of_full_decompositions_on_a_cpu(
    task: str, shape: tuple[int, int], device: str, request: pytest.FixtureRequest
) -> None:
    expected = masks(zoo_stack(task, "fashion", "cpu", shape))
    in_full = request.getfixturevalue("in_full")
    found = masks(zoo_stack(task, "fashion", device, shape))
    for one, other in zip(found, expected, strict=True):
        assert (one != other).double().mean(dim=(1, 2)).max() <= MASK_ERROR
    assert sum(in_full) <= 1  # of sixteen


def test_safe_merge_equals_the_literal_algorithm(device: str, in_full: list[int]) -> None:
    stack = zoo_stack("flags", "mnist", device, layers=2)
    result = MERGE.fold_stack(stack)
    settings = Settings(**MERGE.settings(), rank_eps=FLOAT32_EPS)
    for layer, name in enumerate(stack.layers):
        weights = (part[layer].cpu() for part in (stack.pretrained, stack.merged, stack.incoming))
        merged, _, update, losses = reference_fold(*weights, layer=name, index=2, settings=settings)
        difference = result.merged[layer].cpu().double() - merged
        differ = difference.abs() > 1e-3 * update.abs().max()
        assert differ.double().mean() <= MASK_ERROR  # there the mask was another
        assert (difference * ~differ).norm() <= 5e-5 * update.norm()
        assert result.losses is not None
        assert losses is not None
        assert torch.allclose(result.losses[:, layer].cpu().double(), losses, rtol=1e-4, atol=0)
    assert in_full == []


def test_safe_share_equals_its_literal_definition(device: str, in_full: list[int]) -> None:
    tasks = ["mnist", "flags", "letters"]
    stacks = [zoo_stack(task, task, device, layers=2) for task in tasks]
    base = merged = stacks[0].pretrained
    for index, stack in enumerate(stacks, 1):
        merged = SHARE.fold_stack(Stack(stack.layers, index, base, merged, stack.incoming)).merged
    settings = ShareSettings(scoring_rank=21, shared_rank=32, rank_eps=FLOAT32_EPS)
    for layer in range(2):
        expected = safe_share(base[layer].cpu(), [stack.incoming[layer].cpu() for stack in stacks], settings)[-1]
        difference = (merged - base)[layer].cpu().double() - expected
        differ = difference.abs() > 1e-3 * expected.abs().max()
        assert differ.double().mean() <= 3 * MASK_ERROR  # a mask a task
        assert (difference * ~differ).norm() <= 1e-4 * expected.norm()
    assert in_full == []


@pytest.mark.usefixtures("in_full")
@pytest.mark.parametrize("method", [MERGE, SHARE], ids=lambda method: method.label)
def test_two_folds_have_the_same_bits(method: MergeMethod, device: str) -> None:
    first, second = (method.fold_stack(zoo_stack("flags", "mnist", device)).merged for _ in range(2))
    assert torch.equal(first, second)


def test_small_decompositions_have_the_bits_of_the_cpu(device: str) -> None:
    # beyond 32 columns a GPU's go to the CPU's cores
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 50, 40, generator=generator, dtype=torch.float64)
    gram = matrices.mT @ matrices
    values, vectors = leading.decompose_on_cores(gram.to(device))
    expected = [numpy.linalg.eigvalsh(part.numpy()) for part in gram]
    assert values.device.type == vectors.device.type == device
    assert torch.allclose(values.cpu(), torch.from_numpy(numpy.stack(expected)), rtol=1e-10, atol=0)
    assert torch.equal(values.cpu(), leading.decompose_on_cores(gram)[0])
