"""Where the run is, on standard output: a bar that redraws itself on a terminal, a line now and then elsewhere."""

import os
import sys
import time

STYLES = ("bar", "lines", "none")
_WIDTH = 24


class Progress:
    """Shows steps done, loss, speed and time left. `samples_per_s` counts training only."""

    def __init__(self, total_steps: int, steps_per_epoch: int, style: str | None = None) -> None:
        self._total = total_steps
        self._per_epoch = steps_per_epoch
        self._style = style or os.environ.get("TRAINER_PROGRESS") or ("bar" if sys.stdout.isatty() else "lines")
        self._interval_s = 0.1 if self._style == "bar" else 5.0
        self._shown_at = 0.0
        self._started: tuple[float, int] | None = None

    def show(self, step: int, loss: float, samples_per_s: float) -> None:
        """Draw if the last drawing is old enough, and always at the end."""
        now = time.monotonic()
        self._started = self._started or (now, step)
        if self._style == "none" or (now - self._shown_at < self._interval_s and step < self._total):
            return
        self._shown_at = now
        text = (
            f"epoch {-(-step // self._per_epoch)}  step {step}/{self._total}  loss {loss:.4f}  "
            f"{samples_per_s:,.0f} samples/s  {self._left(step, now)} left"
        )
        if self._style == "lines":
            print(text, flush=True)
        else:
            done = _WIDTH * step // self._total
            end = "\n" if step >= self._total else "\r"
            sys.stdout.write(f"[{'=' * done}{' ' * (_WIDTH - done)}] {text}\x1b[K{end}")
            sys.stdout.flush()

    def _left(self, step: int, now: float) -> str:
        assert self._started is not None
        began, first = self._started
        seconds = (now - began) / max(step - first, 1) * (self._total - step)
        return f"{int(seconds // 3600):d}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
