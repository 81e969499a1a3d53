"""The experiments of docs/experiments.md. They do not ship in the wheel; `scripts/experiments` runs them."""
