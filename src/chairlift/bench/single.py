"""`chairlift bench load`: one server, one load, all figures."""

from __future__ import annotations

from chairlift.bench import figures
from chairlift.bench.live import Live, Shared, machine_note, measure
from chairlift.bench.options import Wanted
from chairlift.bench.report import Report
from chairlift.bench.trial import Trial, meet

COMMAND = "bench load"


def load(shared: Shared, wanted: Wanted, url: str) -> None:
    """Measures and tells."""
    trials: list[Trial] = []

    async def work(progress: Live) -> None:
        async with meet(shared, url) as subject:
            progress.say(f"{subject.name}: {wanted.arrivals}")
            trials.append(Trial(subject, wanted, progress))
            await trials[-1].run()

    measure(shared.output, work, lambda: report(trials[-1] if trials else None, url))


def report(trial: Trial | None, url: str) -> Report:
    """Of what there is."""
    outcome = trial.outcome if trial else None
    if outcome is None:
        return Report(COMMAND, f"{url}: nothing was measured")
    return Report(
        command=COMMAND,
        title=f"{outcome.subject.name}: {outcome.wanted.arrivals}",
        tables=[figures.latencies(outcome), figures.capacity(outcome), figures.facts(outcome)],
        verdict=figures.verdict(outcome),
        warnings=[str(doubt) for doubt in outcome.doubts],
        notes=[*figures.notes(outcome), machine_note(url)],
        data=outcome.as_dict(),
        charts=figures.charts(outcome),
    )
