"""The page of settings is current: `python -m efx.config.reference > docs/settings.md`."""

from efx.config import reference


def test_the_page_of_settings_is_current(root):
    assert (root / "docs/settings.md").read_text() == reference.page()


def test_a_field_has_the_comments_above_and_beside_it():
    from efx.routing.config import DepthRoutingConfig

    found = reference.meanings(DepthRoutingConfig)
    assert found["every"].startswith("blocks every-1") and "zero-based" in found["blocks"]
