"""Container health: one GET of `http://127.0.0.1:<port><path>`; exit 0 for a 200. Slim images have no curl."""

import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}{sys.argv[2]}", timeout=4) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except urllib.error.HTTPError as error:
    # what the part says about itself: `docker inspect` and `docker compose ps` show it
    sys.exit(f"unhealthy: {error.code} {error.read(1000).decode(errors='replace')}")
except OSError as error:
    sys.exit(f"unhealthy: {error}")
