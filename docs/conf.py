"""The configuration of the documentation site; `make docs` builds it.

Every page of this directory is a page of the site. Pages of the guides are notebooks,
which the build runs. A warning is an error.
"""

import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

# Notebooks have a profile of their own.
IPYTHON = tempfile.TemporaryDirectory()
os.environ["IPYTHONDIR"] = IPYTHON.name
shutil.copytree(
    Path(__file__).parent / "_ipython", Path(IPYTHON.name, "profile_default", "startup")
)

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "jaxinf"
author = "The jaxinf authors"
copyright = author
version = release = metadata.version("jaxinf")
html_title = f"jaxinf {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "commands",
    "modules",
]
exclude_patterns = ["_build"]
needs_sphinx = "8.1"
# Decisions are found by their list; scripts/check_site.py wants a link to every page.
suppress_warnings = ["toc.not_included"]

# "--mode" is a flag, also in text that is not marked as code.
smartquotes = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_theme_options = {"light_logo": "logo.svg", "dark_logo": "logo.svg"}
html_favicon = "_static/logo.svg"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 60
# In docstrings, `name` is code.
default_role = "code"
napoleon_use_ivar = True
