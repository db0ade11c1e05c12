"""The schema's history (alembic). A new step:

alembic -c migrations/alembic.ini -x url=sqlite:///path revision --autogenerate -m "what it does"
"""
