"""Eight fake CPU devices, strict rank promotion, a compile cache, and where the real text is."""

import gc
import logging
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Compiling takes most of the suite's time: with these it takes a fourth. The programs that tests
# start inherit them.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

# Reading a program takes 0.2 s, as long as compiling most of those of tests does: without those the
# suite takes an eighth less on an empty cache.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1.0")

import devices
import families
import jax
import pytest

from efx.errors import nearest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Traced programs are millions of objects, which the collector would look through again and again.
# It looks through those of a file once, at its end (`collected`), and in between at new ones alone.
gc.set_threshold(100_000, 30, 1_000_000)
_CACHE = pathlib.Path(
    os.environ.get("EFX_COMPILE_CACHE", pathlib.Path.home() / ".cache/efx/compiled")
)
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What `pytest -m quick` runs, in a minute on two cores: the tests that notice most faults a second,
# three properties of rows that have every kind of part, and three runs from end to end. Slow tests
# among them are left out.
QUICK = {
    "test_batches", "test_selection",
    "test_changed_text", "test_decisions", "test_losses", "test_means", "test_optim",
    "test_routing", "test_run_dir", "test_settings",
}  # fmt: skip
QUICK_PROPERTIES = {
    "test_causal", "test_cached_decoding_is_the_full_forward",
    "test_the_ledger_is_what_is_executed",
}  # fmt: skip
QUICK_TESTS = {
    "test_attend_equals_full_attention",
    "test_evaluating_and_sampling_change_nothing_of_a_run",
    "test_flipped_cut_and_deleted_bytes_of_every_file_are_found_by_name",
    "test_a_killed_run_resumes_bit_for_bit",
    "test_sigterm_saves_and_the_next_launch_makes_up_for_the_evaluation",
    "test_a_finite_loss_with_an_overflowing_gradient_is_not_applied",
    "test_nucleus_is_the_smallest_set_whose_mass_reaches_top_p",
}


def pytest_addoption(parser):
    parser.addoption("--family", metavar="NAME", help="run all properties of one row of FAMILIES")


def pytest_configure(config):
    # pytest-xdist reports a missing file as "no tests ran".
    for name in config.args:
        if not (config.invocation_params.dir / name.partition("::")[0]).exists():
            tests = ROOT.glob("tests/*/test_*.py")
            files = {path.stem: str(path.relative_to(ROOT)) for path in tests}
            raise pytest.UsageError(
                f"{name}: there is no such file or folder"
                + nearest(pathlib.Path(name).stem, files, files)
            )
    name = config.option.family
    if name and name not in families.FAMILIES:
        rows = ", ".join(families.FAMILIES)
        raise pytest.UsageError(
            f"--family={name}: not a row of tests/families.py; use one of {rows}"
        )


def pytest_generate_tests(metafunc):
    mark = metafunc.definition.get_closest_marker("every_row")
    if mark:
        only = metafunc.config.option.family
        metafunc.parametrize("name", families.rows_of(*mark.args, **mark.kwargs, only=only))


def _is_selected(item, family):
    if not item.get_closest_marker("every_row"):
        return not family
    params = item.callspec.params
    if family:
        return params["name"] == family
    return params.get("mesh") in (None, families.mesh_of(params["name"]))


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if _is_selected(item, config.option.family)]
    rows = families.cover(families.FAMILIES, families.Grain.KINDS)
    for item in items:
        row = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        shared = item.path.stem == "test_families" and item.originalname in QUICK_PROPERTIES
        quick = item.path.stem in QUICK or item.originalname in QUICK_TESTS
        if (quick or (shared and row in rows)) and not item.get_closest_marker("slow"):
            item.add_marker("quick")


@pytest.fixture(scope="module", autouse=True)
def collected():
    """What a file of tests leaves is either garbage or kept to the end."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_log():
    """Leave no log handler of a run in this process: it writes to a stream of that test."""
    yield
    log = logging.getLogger("efx")
    log.handlers, log.propagate = [], True


@pytest.fixture(scope="module")
def one_device():
    """Runs take one of the devices: a program for one compiles in two thirds of the time."""
    with devices.only(1):
        yield


@pytest.fixture(scope="session")
def root():
    """The top of the project."""
    return ROOT


@pytest.fixture(scope="session")
def shakespeare_path():
    """The tinyshakespeare text beside the project."""
    path = ROOT.parent / "shared/data/tinyshakespeare/input.txt"
    if not path.exists():
        pytest.skip("tinyshakespeare is not here: expected shared/data beside the project")
    return path
