"""The descriptions of the paper's image sets: counts, spot values, orders; bad descriptions are refused."""

import random
from pathlib import Path

import pytest

from safemerge_pl.data.image_sets import CONTROLS, FOLDER, TASKS, SetSpec, find_spec, find_templates, stream_of

# images in the scored split, classes, templates, right answers of zero-shot ViT-B/32 and of its experts
FACTS = {
    "sun397": (19850, 397, 2, 12541, 14860),
    "stanford-cars": (8041, 196, 8, 4791, 6314),
    "resisc45": (6300, 45, 18, 3797, 5994),
    "eurosat": (2700, 10, 3, 1215, 2675),
    "svhn": (26032, 10, 1, 8233, 25321),
    "gtsrb": (12630, 43, 3, 4108, 12492),
    "mnist": (10000, 10, 1, 4826, 9958),
    "dtd": (1880, 47, 8, 831, 1498),
    "oxford_flowers102": (6149, 102, 1, 4086, 5445),
    "pcam": (32768, 2, 1, 19869, 28823),
    "fer2013": (7178, 7, 6, 2961, 5140),
    "oxford-iiit-pet": (3669, 37, 1, 3057, 3392),
    "stl10": (8000, 10, 2, 7770, 7804),
    "cifar100": (10000, 100, 18, 6372, 8838),
    "cifar10": (10000, 10, 18, 8983, 9760),
    "food101": (25250, 101, 1, 20797, 22323),
    "fashion_mnist": (10000, 10, 2, 6301, 9475),
    "emnist_letters": (20800, 26, 1, 2491, 19888),
    "kmnist": (10000, 10, 1, 995, 9823),
    "rendered-sst2": (1821, 2, 1, 1068, 1298),
}
# the paper's table of single models, percent, in the order of its tasks
PAPER = {
    "clip-vit-base-patch32": {
        "pretrained": "63.2 59.6 60.3 45.0 31.6 32.5 48.3 44.2 66.4 60.6 "
        "41.3 83.3 97.1 63.7 89.8 82.4 63.0 12.0 10.0 58.6",
        "expert": "74.9 78.5 95.1 99.1 97.3 98.9 99.6 79.7 88.6 88.0 71.6 92.5 97.5 88.4 97.6 88.4 94.7 95.6 98.2 71.3",
    },
    "clip-vit-base-patch16": {
        "pretrained": "65.5 64.7 66.4 54.1 52.0 43.5 51.7 45.0 71.3 54.0 "
        "46.4 88.4 98.3 66.3 90.8 87.0 67.3 12.4 11.2 60.6",
        "expert": "78.9 85.9 96.6 99.0 97.6 99.0 99.7 82.3 94.9 90.6 72.8 94.5 98.2 88.8 98.3 91.9 94.5 95.3 98.1 75.7",
    },
    "clip-vit-large-patch14": {
        "pretrained": "68.2 77.9 71.3 61.2 58.4 50.5 76.3 55.5 79.2 51.2 "
        "50.0 93.2 99.4 75.1 95.6 91.2 67.0 12.3 9.7 68.9",
        "expert": "82.8 92.8 97.4 99.1 97.9 99.2 99.8 85.5 97.7 91.1 75.9 95.7 99.2 93.0 99.1 94.8 95.3 95.4 98.3 80.5",
    },
}


def test_every_file_is_a_task_or_a_control_set() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*")) == sorted((*TASKS, *CONTROLS))
    assert list(FACTS) == list(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_facts_of_a_task(name: str) -> None:
    spec = find_spec(name)
    backbone = "openai/clip-vit-base-patch32"
    counts = spec.count(backbone, "pretrained"), spec.count(f"/models/{Path(backbone).name}", "expert")
    assert (spec.size, len(spec.classes), len(spec.templates), *counts) == FACTS[name]
    assert len(set(spec.classes)) == len(spec.classes)
    assert spec.split == ("validation" if name == "food101" else "test")
    assert spec.count("openai/clip-vit-huge-patch14", "pretrained") is None


@pytest.mark.parametrize("backbone", PAPER)
@pytest.mark.parametrize("kind", ["pretrained", "expert"])
def test_right_answers_are_the_paper_s_accuracies(backbone: str, kind: str) -> None:
    for name, percent in zip(TASKS, PAPER[backbone][kind].split(), strict=True):
        spec = find_spec(name)
        count = spec.count(backbone, kind)
        assert count is not None
        assert spec.size is not None
        assert abs(100 * count / spec.size - float(percent)) < 0.051, name


@pytest.mark.parametrize(
    ("name", "index", "expected"),
    [
        ("oxford_flowers102", 59, "pink-yellow dahlia"),
        ("cifar100", 1, "aquarium_fish"),
        ("cifar100", 99, "worm"),
        ("oxford-iiit-pet", 1, "american_bulldog"),
        ("oxford-iiit-pet", 14, "german_shorthaired"),
        ("sun397", 1, "airplane cabin"),
        ("sun397", 396, "youth hostel"),
        ("stanford-cars", 0, "AM General Hummer SUV 2000"),
        ("stanford-cars", 195, "smart fortwo Convertible 2012"),
        ("eurosat", 2, "brushland or shrubland"),
        ("eurosat", 9, "lake or sea"),
        ("gtsrb", 14, "stop"),
        ("pcam", 1, "lymph node containing metastatic tumor tissue"),
        ("fashion_mnist", 0, "T - shirt / top"),
        ("emnist_letters", 0, "A"),
        ("kmnist", 9, "を"),
        ("mnist", 7, "7"),
        ("food101", 100, "waffles"),
        ("dtd", 30, "polka-dotted"),
        ("resisc45", 44, "wetland"),
        ("imagenet", 0, "tench"),
        ("imagenet-r", 0, "goldfish"),
        ("objectnet", 0, "alarm clock"),
        ("objectnet", 112, "wok"),
    ],
)
def test_spot_values(name: str, index: int, expected: str) -> None:
    assert find_spec(name).classes[index] == expected


def test_flowers_are_torchvision_s() -> None:
    """Independent of where ours come from."""
    torchvision = pytest.importorskip("torchvision", minversion="0.22")  # older ones do not name them
    theirs = [name.rstrip("?") for name in torchvision.datasets.Flowers102.classes]
    assert list(find_spec("oxford_flowers102").classes) == theirs


def test_indices_of_imagenet_r_are_timm_s() -> None:
    """Independent of where ours come from."""
    import timm
    import yaml

    indices = Path(timm.__file__).parent / "data" / "_info" / "imagenet_r_indices.txt"
    ours = yaml.safe_load((FOLDER / "imagenet-r.yaml").read_text())["classes"]["indices"]
    assert ours == [int(line) for line in indices.read_text().split()]


def test_held_out_sets() -> None:
    """One plain prompt for ImageNet, the 80 of open_clip for the others."""
    shapes = {name: (len(find_spec(name).classes), len(find_spec(name).templates)) for name in CONTROLS}
    assert shapes == {"imagenet": (1000, 1), "imagenet-r": (200, 80), "objectnet": (113, 80)}
    assert [find_spec(name).size for name in CONTROLS] == [50000, 30000, 18574]
    prompts = find_spec("objectnet").templates
    assert len(set(prompts)) == 80, "closures must not share their last sentence"
    assert (prompts[0], prompts[-1]) == ("a bad photo of a {}.", "a tattoo of the {}.")
    assert len(find_templates("simple", "here")) == 7


def test_the_paper_s_orders() -> None:
    """Streams are the first 8, 14 and 20 names, orders shuffle their positions with seeds 42 to 51."""
    from safemerge_pl.data.benchmark import CLIPBenchmarkData

    for length in (8, 14, 20):
        for seed in (42, 51):
            places = list(range(length))
            random.Random(seed).shuffle(places)
            data = CLIPBenchmarkData(tasks=length, order_seed=seed)
            assert data.stream.names == tuple(TASKS[place] for place in places)
    assert data.controls == CONTROLS
    with pytest.raises(ValueError, match=r"streams have 8, 14 and 20 tasks, not 9"):
        stream_of(9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hub: a/b\nsplit: test\nclasses: [x]", "lacks templates"),
        ("hub: a/b\nsplit: test\nclasses: [x]\ntemplates: single\nlabels: cls", "has an unknown labels"),
        ("hub: a/b\nsplit: test\nclasses: [no, yes]\ntemplates: single", "put quotes around numbers, yes and no"),
        ("hub: a/b\nsplit: test\nclasses: {open_clip: cifar}\ntemplates: single", "`open_clip: imagenet`"),
        ("hub: a/b\nsplit: test\nclasses: [x]\ntemplates: [a photo]", r"sentences with \{\} for the class name"),
        ("hub: a/b\nsplit: test\nclasses: [x]\ntemplates: openia", "no templates 'openia'"),
        ("- a list", "describes no image set"),
        ("hub: [", "is no YAML file"),
    ],
)
def test_a_bad_description(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        find_spec("mine", tmp_path)
    assert "mine.yaml" in str(caught.value)


def test_a_set_of_the_user_s(tmp_path: Path) -> None:
    (tmp_path / "mnist.yaml").write_text("hub: me/mine\nsplit: train\nclasses: ['0', '1']\ntemplates: ['{}']\n")
    assert find_spec("mnist", tmp_path) == SetSpec("mnist", "me/mine", "train", ("0", "1"), ("{}",))
    assert find_spec("dtd", tmp_path) == find_spec("dtd")
    with pytest.raises(ValueError, match=r"no image set 'minst'; did you mean 'mnist'\?"):
        find_spec("minst", tmp_path)
