-- Included by the scripts that know jobs: wall time, events and names of job records.
--
-- An event is msgpack [time_us, kind, detail] in the field `e<number>` of job:{m}:<id>; `v` is the number of the last
-- one. The first, `accepted`, is not kept: everything about it is in other fields.
local function now_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- `packed` is kind and detail, packed one after the other.
local function event(time_us, packed)
  return '\147' .. cmsgpack.pack(time_us) .. packed
end

local function hex(bytes)
  return (string.gsub(bytes, '.', function(char)
    return string.format('%02x', string.byte(char))
  end))
end

-- Names of records in the slot of `tag`, "{m}": of a job, of its responses, and of an idempotency key.
local function job_in_slot(tag, id)
  return 'job:' .. tag .. ':' .. hex(id)
end

local function responses_in_slot(tag, id)
  return 'jr:' .. tag .. ':' .. hex(id)
end

local function key_in_slot(tag, digest)
  return 'idem:' .. tag .. ':' .. hex(digest)
end
