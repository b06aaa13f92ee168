#!/bin/sh
# SMG 1.13 (`pip install smg`) in front of the servers of smg-workers.json. Without --api-key, each client's own key
# goes through. The thresholds are for servers of a few streams: SMG's defaults leave all but one of them idle.
exec smg launch --host "${HOST:-127.0.0.1}" --port "${PORT:-8080}" \
  --policy cache_aware --balance-abs-threshold 1 --balance-rel-threshold 1.1 \
  --discovery-provider file --discovery-file "${WORKERS:-smg-workers.json}" \
  --worker-overload-waiting-requests 64 \
  --health-check-interval-secs 2 --health-failure-threshold 2 --health-check-timeout-secs 1 \
  --cb-failure-threshold 2 --cb-timeout-duration-secs 5 "$@"
