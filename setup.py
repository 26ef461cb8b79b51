"""Packages of the wheel: every folder of ``safemerge_pl``, and ``configs`` beside it as ``safemerge_pl.configs``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["safemerge_pl", "safemerge_pl.*"]), "safemerge_pl.configs"],
    package_dir={"safemerge_pl": "safemerge_pl", "safemerge_pl.configs": "configs"},
)
