#!lua flags=allow-oom
-- Raise the attempt of requests before they are executed, so that a settle of an older one is fenced; drop what is
-- settled; tell jobs and journal what begins.
--
-- KEYS[1] u:{m}  hash of unsettled requests in groups (see group_values.lua); attempts are raised, never lowered
-- KEYS[2] n:{m}  hash; `owner` and `token` say who may decide about the model (read only)
-- KEYS[3] j:{m}  journal (only given with jobs or journalled requests); gets a `batched` fact
-- KEYS[4..] job:{m}:<id> the records of jobs, in the order below; get running, attempts and a `batched` event
--
-- ARGV[1] the caller's owner token
-- ARGV[2] the attempt that begins
-- ARGV[3] g, how many groups
-- ARGV[4] how many jobs
-- ARGV[5] the jobs' packed kind and detail
-- ARGV[6] the packed `batched` fact about the journalled requests, "" when none is
-- ARGV[7] which requests are journalled: "1" or "0" for each, "" when all are
-- then g group names, then g strings of last bytes, then the jobs: number of the request in this call, ...
--
-- Returns 0 when the token is not the owner's (any more), 1 when all requests are unsettled, else a string with one
-- character for each: "1" unsettled, "0" settled or unknown.

--#include group_values.lua
--#include job_events.lua
--#include tell.lua

local lease = redis.call('HMGET', KEYS[2], 'owner', 'token')
if not lease[1] or lease[2] ~= ARGV[1] then
  return 0
end

local attempt, groups, at = tonumber(ARGV[2]), tonumber(ARGV[3]), 8
local mark = math.min(attempt, 127) + 128
local raised, masks, all = {}, {}, true

-- Members one by one: the value with their attempts raised, nil if nothing changes, and who is unsettled.
local function raise_members(value, lasts)
  local cut = string.find(value, '[:;]')
  local marks, places, changed, known = {string.byte(value, 1, cut - 1)}, nil, false, {}
  if string.byte(value, cut) == 59 then
    places = {}
    for place = 1, cut - 1 do
      places[string.byte(value, cut + place)] = place
    end
  end
  for i = 1, #lasts do
    local last = string.byte(lasts, i)
    local place = last + 1
    if places then
      place = places[last]
    end
    local old = place and marks[place]
    if old and old ~= 46 then
      known[i] = '1'
      if old < mark then
        marks[place], changed = mark, true
      end
    else
      known[i], all = '0', false
    end
  end
  return changed and string.char(unpack(marks)) .. string.sub(value, cut), table.concat(known)
end

for from = 0, groups - 1, 4000 do
  local to = math.min(from + 3999, groups - 1)
  local known = redis.call('HMGET', KEYS[1], unpack(ARGV, at + from, at + to))
  for k = from, to do
    local value, lasts = known[k - from + 1], ARGV[at + groups + k]
    local left = nil
    if value and whole(value, lasts, attempt - 1) then
      left = string.rep(string.char(mark), #lasts) .. string.sub(value, #lasts + 1)
    elseif value then
      left, masks[k] = raise_members(value, lasts)
    else
      masks[k], all = string.rep('0', #lasts), false
    end
    if left then
      raised[#raised + 1] = ARGV[at + k]
      raised[#raised + 1] = left
    end
  end
end
for from = 1, #raised, 4000 do
  redis.call('HSET', KEYS[1], unpack(raised, from, math.min(from + 3999, #raised)))
end
local mask = nil
if not all then
  local parts = {}
  for k = 0, groups - 1 do
    parts[k + 1] = masks[k] or string.rep('1', #ARGV[at + groups + k])
  end
  mask = table.concat(parts)
end

local first_job = at + 2 * groups
for i = 1, tonumber(ARGV[4]) do
  if all or string.byte(mask, ARGV[first_job + i - 1]) == 49 then
    local job = redis.call('HMGET', KEYS[3 + i], 's', 'v')
    if job[1] == 'q' or job[1] == 'r' then
      local last = (job[2] or 1) + 1
      redis.call('HSET', KEYS[3 + i], 's', 'r', 'a', ARGV[2], 'v', last, 'e' .. last, event(now_us(), ARGV[5]))
    end
  end
end

if ARGV[6] ~= '' then
  tell(KEYS[3], ARGV[6], mask, ARGV[7])
end
return all and 1 or mask
