#!lua flags=allow-oom
-- End requests of one model: the first settle of a request wins, one of an older attempt is fenced.
-- Allowed when the server is out of memory: settling is what frees it.
--
-- KEYS[1] u:{m}                 hash request id -> "<attempt>:<size_bytes>"; loses the requests won
-- KEYS[2] n:{m}                 hash; `bytes` shrinks by the payload of the requests won
-- KEYS[3] s:{m}:<version>:<hash> statistics hash (only given with statistics); grows when all requests were won
--
-- ARGV[1] n, how many requests
-- ARGV[2] how many attempts follow the ids: n, or 1 when all requests are at the same one
-- ARGV[3] how many of the statistics are sums; those after them are maxima of non-negative integers
-- then n request ids, then the attempts, then the statistics: field, value, ...
--
-- Returns 1 when all were won, else a string of n characters: "1" won, "0" not.

--#include fold_statistics.lua

local n = tonumber(ARGV[1])
local attempts = tonumber(ARGV[2])
local first_attempt = n + 4

local gone, won, lost, freed = {}, {}, 0, 0
for from = 1, n, 4000 do
  local to = math.min(from + 3999, n)
  local known = redis.call('HMGET', KEYS[1], unpack(ARGV, from + 3, to + 3))
  for i = from, to do
    local value = known[i - from + 1]
    if value then
      local colon = string.find(value, ':', 1, true)
      local attempt = ARGV[first_attempt + (attempts == 1 and 0 or i - 1)]
      local id = ARGV[i + 3]
      -- an id named twice in one call is won once
      if not won[id] and tonumber(string.sub(value, 1, colon - 1)) <= tonumber(attempt) then
        won[id] = i
        gone[#gone + 1] = id
        freed = freed + tonumber(string.sub(value, colon + 1))
      else
        lost = lost + 1
      end
    else
      lost = lost + 1
    end
  end
end

if #gone > 0 then
  for from = 1, #gone, 4000 do
    redis.call('HDEL', KEYS[1], unpack(gone, from, math.min(from + 3999, #gone)))
  end
  redis.call('HINCRBY', KEYS[2], 'bytes', -freed)
end

if lost > 0 then
  local mask = {}
  for i = 1, n do
    mask[i] = won[ARGV[i + 3]] == i and '1' or '0'
  end
  return table.concat(mask)
end

local at = first_attempt + attempts
fold_statistics(KEYS[3], at, at + 2 * tonumber(ARGV[3]))
return 1
