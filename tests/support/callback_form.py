"""Runs a program in a form of callback that its backend would not choose.

run_python(PROGRAM, CALLBACK_FORM="start")    in the program: callback_form.use_given()
"""

import os

import pytest

from jaxinf.optimizer import callback, update


def use(form, patch):
    """Has each call of the host take a form: ``buffer`` or ``start``."""
    for module in (callback, update):
        patch.setattr(module, "shares_memory", lambda: form == "buffer")


def use_given():
    """Uses the form in the variable CALLBACK_FORM, if there is one, in this process."""
    if form := os.environ.get("CALLBACK_FORM"):
        use(form, pytest.MonkeyPatch())
