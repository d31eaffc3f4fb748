"""Datasets: what data files hold, known before they are loaded; rows as [data] of a run's file asks for them."""
