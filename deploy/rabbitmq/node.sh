#!/bin/sh
# Run a node of docker-compose.yml.
set -eu

# The second and third node have the first one's data at /first. They copy its Erlang cookie, and join it when it runs: a
# new node that started before it would form a cluster of its own. Later they don't wait, because it may need them to start.
if [ -d /first ]; then
    trap exit TERM
    until [ -s /first/.erlang.cookie ]; do sleep 1; done
    install -m 400 -o rabbitmq /first/.erlang.cookie /var/lib/rabbitmq/.erlang.cookie
    [ -d /var/lib/rabbitmq/mnesia ] || until rabbitmq-diagnostics -qn rabbit@rabbitmq check_running; do sleep 1; done
fi

# Nodes of RabbitMQ 4.0 that start together may stop with an error, and start at the next attempt. The container stays:
# one that ends counts as unhealthy, and then `docker compose up --wait` fails.
trap 'kill -TERM "$server"; wait "$server"; exit' TERM
until docker-entrypoint.sh rabbitmq-server & server=$! && wait "$server"; do sleep 1; done
