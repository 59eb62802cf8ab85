#!lua
-- Raise the attempt of requests before they are executed again, so that a settle of the older one is fenced.
--
-- KEYS[1] u:{m}  hash request id -> "<attempt>:<size_bytes>"; the attempt is raised, never lowered
-- KEYS[2] n:{m}  hash; `owner` and `token` say who may decide about the model (read only)
--
-- ARGV[1] the caller's owner token
-- ARGV[2] the attempt that begins
-- then the request ids
--
-- Returns 0 when the token is not the owner's (any more), else a string with one character for each id:
-- "1" unsettled, "0" settled or unknown.

local lease = redis.call('HMGET', KEYS[2], 'owner', 'token')
if not lease[1] or lease[2] ~= ARGV[1] then
  return 0
end

local attempt = tonumber(ARGV[2])
local mask = {}
for from = 3, #ARGV, 2000 do
  local to = math.min(from + 1999, #ARGV)
  local known = redis.call('HMGET', KEYS[1], unpack(ARGV, from, to))
  local raised = {}
  for i = from, to do
    local value = known[i - from + 1]
    mask[i - 2] = value and '1' or '0'
    if value then
      local colon = string.find(value, ':', 1, true)
      if tonumber(string.sub(value, 1, colon - 1)) < attempt then
        raised[#raised + 1] = ARGV[i]
        raised[#raised + 1] = ARGV[2] .. string.sub(value, colon)
      end
    end
  end
  if #raised > 0 then
    redis.call('HSET', KEYS[1], unpack(raised))
  end
end
return table.concat(mask)
