"""The site of tritonemu: `make docs`."""

project = "tritonemu"
author = "The gdpa-kernels authors"
copyright = "2026, the gdpa-kernels authors"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "tritonemu"
html_show_sphinx = False
html_static_path, html_css_files = ["_static"], ["site.css"]
html_theme_options = {"show_toc_level": 1, "navbar_persistent": []}
