"""What a step costs: stage timing, and the paper's speed-up model."""

from dpquant_compile.perf.speedup import Accelerator, Speedup, StageTimes, TotalTimes, estimate_speedup
from dpquant_compile.perf.stages import measure_stages

__all__ = ["Accelerator", "Speedup", "StageTimes", "TotalTimes", "estimate_speedup", "measure_stages"]
