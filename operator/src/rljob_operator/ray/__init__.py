"""All requests to Ray dashboards."""
