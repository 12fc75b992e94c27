package controller

import "github.com/soliton-train/soliton/internal/net/control"

// The messages that the controller takes in and gives out; see package control.
type (
	Report = control.Report
	Filled = control.Filled
	Peer   = control.Peer
	Order  = control.Order
	Fill   = control.Fill
)
