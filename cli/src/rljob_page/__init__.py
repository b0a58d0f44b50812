"""Makes one self-contained HTML page from the folder of a run: `write_page`. The page needs no server and no network.

`run_files` reads the folder, `page_data` makes one JSON document of it, and `page` writes that document and the scripts
of `assets/` into a template. The trainer writes the page, too, so this package imports only the standard library,
`rljob_api` and jinja2.
"""
