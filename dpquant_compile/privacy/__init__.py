"""Private training: clipping, mechanism, accounting, schedule, data, several processes."""
