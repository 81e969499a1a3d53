"""Where the repository's own files lie."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
FIXTURES = TESTS / "fixtures"
