package comm_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/soliton-train/soliton/comm"
)

// Three workers add up their gradients. One of them is killed, the others edit the group in place and go on.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	network := comm.NewMem() // comm.TCP{} between processes

	var peers []comm.Peer
	var endpoints []*comm.Endpoint
	for worker := range 3 {
		self := comm.Session{Worker: comm.WorkerID(worker), Incarnation: 1}
		e, err := comm.Listen(comm.Config{Self: self, Transport: network})
		if err != nil {
			log.Fatal(err)
		}
		defer e.Close()
		endpoints = append(endpoints, e)
		peers = append(peers, comm.Peer{Session: self, Addr: e.Addr()})
	}
	groups := make([]*comm.Group, 3)
	for i, e := range endpoints {
		if err := e.SetMembers(peers); err != nil {
			log.Fatal(err)
		}
		var err error
		if groups[i], err = comm.NewGroup(e, 1); err != nil {
			log.Fatal(err)
		}
	}

	// sum adds up 1, 2 and 3 on the first n workers.
	sum := func(version comm.Version, n int) {
		var members []comm.Session
		for _, p := range peers[:n] {
			members = append(members, p.Session)
		}
		results := make([]float32, n)
		var all sync.WaitGroup
		for i, g := range groups[:n] {
			all.Go(func() {
				if _, err := g.Edit(ctx, version, members); err != nil {
					log.Fatal(err)
				}
				gradient := []float32{float32(i + 1)}
				if err := g.AllReduce(ctx, comm.Call{Version: version, Step: 1}, gradient); err != nil {
					log.Fatal(err)
				}
				results[i] = gradient[0]
			})
		}
		all.Wait()
		fmt.Println("version", version, results)
	}
	first := comm.Version{Generation: 1, N: 1}
	sum(first, 3)

	endpoints[2].Close()
	<-groups[0].Ended() // the version ends on the survivors
	<-groups[1].Ended()
	err := groups[0].Barrier(ctx, comm.Call{Version: first, Step: 2})
	var failed *comm.GroupError
	fmt.Println("failed:", errors.As(err, &failed))

	sum(comm.Version{Generation: 1, N: 2}, 2)
	// Output:
	// version 1.1 [6 6 6]
	// failed: true
	// version 1.2 [3 3]
}
