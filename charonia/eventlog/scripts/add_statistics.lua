#!lua flags=allow-oom
-- Add to the statistics of one incarnation of a model version.
--
-- KEYS[1] s:{m}:<version>:<hash> statistics hash; sums grow, maxima are raised
--
-- ARGV[1] how many of the statistics are sums, those after them are maxima of non-negative integers; or "run"
-- then the statistics: their names, then their values

--#include fold_statistics.lua

return fold_statistics(KEYS[1], 2, ARGV[1]) or 1
