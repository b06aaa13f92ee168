#!/bin/sh
# vllm-router 0.1.17 (`pip install vllm-router`; Linux only) places requests by the KV events of two servers. Each server:
#   mlx-serve serve --host 0.0.0.0 --kv-events 'tcp://*:5557' --kv-events-replay 'tcp://*:5558' --kv-events-topic=
A="${A:-192.168.1.11}" B="${B:-192.168.1.12}"
exec vllm-router --host "${HOST:-127.0.0.1}" --port "${PORT:-8080}" --policy kv_aware \
  --worker-urls "http://$A:${A_PORT:-8000}" "http://$B:${B_PORT:-8000}" \
  --kv-event-source "http://$A:${A_PORT:-8000}=tcp://$A:${A_EVENTS:-5557}" \
  --kv-event-source "http://$B:${B_PORT:-8000}=tcp://$B:${B_EVENTS:-5557}" \
  --kv-event-replay-source "http://$A:${A_PORT:-8000}=tcp://$A:${A_REPLAY:-5558}" \
  --kv-event-replay-source "http://$B:${B_PORT:-8000}=tcp://$B:${B_REPLAY:-5558}" \
  --kv-event-model "${MODEL:-smollm2}" --kv-event-block-size 32 "$@"
