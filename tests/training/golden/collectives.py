"""Record the collectives of each mesh: `python -m tests.training.golden.collectives`."""

import json

import tests.conftest  # noqa: F401  # the devices and options of all tests
from tests.training.test_sharded_steps import CASES, RECORD, SELDOM, label, messages

if __name__ == "__main__":
    collectives = {label(case): messages(*case) for case in CASES + SELDOM}
    RECORD.write_text(json.dumps(collectives, indent=1, sort_keys=True) + "\n")
