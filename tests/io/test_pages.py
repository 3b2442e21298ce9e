import jaxinf.io.pages
import jaxinf.layout


def test_layers_agree_on_the_page():
    # The two packages are siblings and do not import each other.
    assert jaxinf.io.pages.PAGE_BYTES == jaxinf.layout.PAGE_BYTES
