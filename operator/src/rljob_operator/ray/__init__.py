"""All HTTP to Ray dashboards."""
