"""Grafana dashboards and Prometheus rules as code, built from `inferdbg.tracing.catalog`."""
