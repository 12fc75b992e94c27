package control

import "github.com/soliton-train/soliton/internal/net/reach"

// Reach asks a host, as the first message, whether it can reach the machine of another one.
type Reach struct {
	Protocol int
	Host     string // name of the other one
}

// Reached answers Reach.
type Reached struct{ Found reach.Finding }

func (Reach) kind() string   { return "reach" }
func (Reached) kind() string { return "reached" }
