"""The package list, generated from the tree: reshard/ and the three folders that are installed inside it."""

from setuptools import find_packages, setup

INSIDE = {"reshard.formats": "formats", "reshard.cli": "cli", "reshard.plugins": "plugins"}

setup(
    packages=[
        *find_packages(include=["reshard", "reshard.*"]),
        *INSIDE,
        *(f"{package}.{inner}" for package, folder in INSIDE.items() for inner in find_packages(folder)),
    ],
    package_dir={"reshard": "reshard", **INSIDE},
)
