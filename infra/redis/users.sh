#!/bin/sh
# Prints the ACL file: users.sh TEMPLATE DIRECTORY, where DIRECTORY holds one file redis_<role> with each role's password.
# The log holds digests only. Surrounding white space is no part of a password, as for --log-password-file.
set -eu
template=$1
secrets=$2
rules=
for role in gateway batcher executor webhooks operator; do
    password=$(tr '\r\n' '  ' < "$secrets/redis_$role" | sed 's/^[[:space:]]*//; s/[[:space:]]*$//')
    [ -n "$password" ] || { echo "users.sh: $secrets/redis_$role is empty" >&2; exit 1; }
    digest=$(printf %s "$password" | sha256sum | cut -c 1-64)
    rules="$rules;s/<$role>/$digest/"
done
# a file of users has one line for each and no comments
sed -e '/^#/d' -e '/^$/d' -e "${rules#;}" "$template" | awk '
    /^ / { sub(/^ +/, " "); printf "%s", $0; next }
    { if (NR > 1) print ""; printf "%s", $0 }
    END { print "" }'
