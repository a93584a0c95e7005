"""What tests of scenes share: pictures are drawn by the compiled passes, and without them."""

import pytest

from thinwire.uses.scenes.view import render as rendering


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest):
    if request.param == "compiled":
        if not rendering.there():
            pytest.skip("no C compiler when thinwire was installed")
        yield
    else:
        with rendering.without():
            assert not rendering.there()
            yield
